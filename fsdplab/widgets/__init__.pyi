from fsdplab.figures.lab.choices import Choices as Choices
from fsdplab.figures.lab.choices import Request as Request
from fsdplab.figures.lab.choices import check as check
from fsdplab.widgets.lab_state import Batch as Batch
from fsdplab.widgets.lab_state import LabState as LabState
from fsdplab.widgets.running import Runner as Runner
from fsdplab.widgets.strategy_lab import StrategyLab as StrategyLab
