"""`examples/text_games.py` beside packages of another environment, which come after this one's."""

import os
import sys

sys.path.append(os.environ["PACKAGES_OF_GAMES"])

from examples.text_games import SkyRLGym, TextArena

__all__ = ["SkyRLGym", "TextArena"]
