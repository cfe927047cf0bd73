from .embedded import EmbeddedRanks as EmbeddedRanks
from .protocol import RankFailed as RankFailed
from .protocol import RankGroup as RankGroup
from .protocol import RanksLost as RanksLost
from .protocol import RankTraceback as RankTraceback
from .protocol import WorkerSpec as WorkerSpec
from .ray import RayRanks as RayRanks
