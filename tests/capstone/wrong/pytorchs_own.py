"""20.shards: the one that you are to write"""

from torch.distributed.fsdp import fully_shard  # noqa: F401
