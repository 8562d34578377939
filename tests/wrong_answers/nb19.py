"""Wrong answers to the exercises of notebook 19, written from their statements alone; of each, what its report says."""


def order__full_and_late():
    return {"gpu": "h100", "gpus": 64, "strategy": "full_shard", "micro_batch": 1, "checkpointing": "full"}


def order__full_and_dear():
    return {"gpu": "h100", "gpus": 512, "strategy": "full_shard", "micro_batch": 1, "checkpointing": "full"}


def order__a_few_hours_too_late():
    return {"gpu": "a100", "gpus": 152, "strategy": "full_shard", "micro_batch": 1, "checkpointing": "selective"}
