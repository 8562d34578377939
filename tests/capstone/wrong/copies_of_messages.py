"""20.fully_shard: could be written into the message at once

The base as it is: `pad` and `cat` copy, and a block is unsharded before the one after it is resharded.
"""
