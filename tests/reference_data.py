"""Paths of reference data of the original environments.

$GIGPO_JAX_REFERENCE_DATA names a folder with all data. Without the variable,
tests use the samples in tests/data; see the README there.
"""

import os
import pathlib

import pytest

_VARIABLE = os.environ.get('GIGPO_JAX_REFERENCE_DATA', '')
IS_FULL = bool(_VARIABLE)
FOLDER = pathlib.Path(_VARIABLE or pathlib.Path(__file__).parent / 'data')
ALFWORLD = FOLDER / 'alfworld'
WEBSHOP = FOLDER / 'webshop'
OFFICIAL_GAME = (
  ALFWORLD
  / 'official_game_single_agent/train'
  / 'pick_heat_then_place_in_recep-Potato-None-SinkBasin-14'
  / 'trial_T20190908_231731_054988'
)
needs_full_data = pytest.mark.skipif(
  not IS_FULL,
  reason='needs $GIGPO_JAX_REFERENCE_DATA; see tests/data/README.md',
)
