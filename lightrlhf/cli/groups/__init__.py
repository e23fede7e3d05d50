"""Groups of flags that programs share; each program's argument class is composed of them.

The first line of a group's docstring is its title in `--help`, the docstring of a field its sentence.
"""

from lightrlhf.cli.groups.agents import AgentArgs, EpisodeArgs, GroupAgentArgs, names_episodes
from lightrlhf.cli.groups.data import DataArgs, DataSetsArgs, DrawnDataArgs, SealArgs
from lightrlhf.cli.groups.devices import DeviceArgs, TensorParallelArgs
from lightrlhf.cli.groups.evaluation import EvalArgs, EvalIntervalArgs
from lightrlhf.cli.groups.model import FrozenArgs, ModelArgs, StartArgs
from lightrlhf.cli.groups.optimizer import OptimizerArgs
from lightrlhf.cli.groups.rewards import AuditArgs, RewardArgs
from lightrlhf.cli.groups.run import DryRunArgs, RolloutLogArgs, RunArgs
from lightrlhf.cli.groups.sampling import DecodingArgs, SamplingArgs
from lightrlhf.cli.groups.servers import AheadServerArgs, RolloutServerArgs, ServerArgs
from lightrlhf.cli.groups.teacher import TeacherArgs, TeacherTermArgs
from lightrlhf.cli.groups.train import FrozenModelsArgs, TrainArgs

__all__ = [
    "AgentArgs",
    "AheadServerArgs",
    "AuditArgs",
    "DataArgs",
    "DataSetsArgs",
    "DecodingArgs",
    "DeviceArgs",
    "DrawnDataArgs",
    "DryRunArgs",
    "EpisodeArgs",
    "EvalArgs",
    "EvalIntervalArgs",
    "FrozenArgs",
    "FrozenModelsArgs",
    "GroupAgentArgs",
    "ModelArgs",
    "OptimizerArgs",
    "RewardArgs",
    "RolloutLogArgs",
    "RolloutServerArgs",
    "RunArgs",
    "SamplingArgs",
    "SealArgs",
    "ServerArgs",
    "StartArgs",
    "TeacherArgs",
    "TeacherTermArgs",
    "TensorParallelArgs",
    "TrainArgs",
    "names_episodes",
]
