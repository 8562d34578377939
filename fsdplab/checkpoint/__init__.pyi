from fsdplab.checkpoint.files import CheckpointDamaged as CheckpointDamaged
from fsdplab.checkpoint.folder import CheckpointFolder as CheckpointFolder
from fsdplab.checkpoint.folder import CheckpointNotSaved as CheckpointNotSaved
from fsdplab.checkpoint.folder import published as published
from fsdplab.checkpoint.state import full_state_dict as full_state_dict
from fsdplab.checkpoint.state import load as load
from fsdplab.checkpoint.state import save as save
from fsdplab.checkpoint.state import states_of as states_of
