from fsdplab.recording.assemble import open_record as open_record
from fsdplab.recording.by_hand import Recorder as Recorder
from fsdplab.recording.by_hand import lightning_callback as lightning_callback
from fsdplab.recording.by_hand import trainer_callback as trainer_callback
