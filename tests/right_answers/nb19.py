"""Right answers to the exercises of notebook 19, besides the references."""

import numpy as np


def order__worked_out_in_numpy():
    gpus = 8 * np.ceil(np.float64(95) / 8)
    return dict(gpu="h100", gpus=gpus, strategy="full_shard", micro_batch=np.int64(1), checkpointing="selective")
