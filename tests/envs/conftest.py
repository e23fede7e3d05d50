"""AutoExplore on a small tree."""

import pytest
from helpers.explore import SECRET, TEXTS, grow, tasks_of


@pytest.fixture(scope="session")
def explored(tmp_path_factory):
    """A folder with a small tree, a secret file next to the tree, and the tasks."""
    folder = tmp_path_factory.mktemp("explore")
    grow(folder / "tree", TEXTS)
    grow(folder, {"secret.txt": SECRET})
    return folder, tasks_of(folder)


@pytest.fixture
def explore_env(explored):
    from lightrlhf.envs import make_env

    return make_env("auto_explore", task_dir=explored[1])
