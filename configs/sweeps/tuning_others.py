r"""Tunes the learning rate of `:mini` for the environments not in tuning.py.

    python launch/sweep.py --sweep=configs/sweeps/tuning_others.py \
        --workdir=runs/tuning

As in tuning.py, with seed 100 and the split that the config does not evaluate.
On keys and doors, also the other methods of credit.py, and GiGPO a second time
with two seeds and 512 levels. On TextWorld, also GraphGPO. On Sokoban, two
seeds and 512 levels, because one seed and 128 tasks selected rates that were
too high elsewhere. All tasks of gymnasium.py are the same lake, so that only
the seed differs. Runs there may fail at a rate that one seed selects, so that
its two best rates have three seeds. ALFWorld with full rooms evaluates 128
games, the help desk of held_out.py 256 requests with two seeds.
"""

from configs.sweeps import credit, keydoor, tuning

SPLITS = {
  'keydoor': 'valid',
  'textworld': 'test',
  'gymnasium': 'test',
}

OTHERS = {
  name: word
  for name, (word, overrides) in credit.METHODS.items()
  if name not in keydoor.METHODS and not overrides
}

RUNS = tuning.runs(keydoor.METHODS, SPLITS)
RUNS += tuning.runs(OTHERS, {'keydoor': 'valid'})
_LARGE = {'seeds': [100, 101], 'fields': {'evaluation.num_tasks': 512}}
RUNS += [
  run | {'name': f'{run["name"]}, 512 levels'}
  for run in tuning.runs({'gigpo': ''}, {'keydoor': 'valid'}, **_LARGE)
]
RUNS += tuning.runs(
  keydoor.METHODS | OTHERS,
  {'sokoban': 'test'},
  [3.75e-5, 7.5e-5, 1.5e-4],
  **_LARGE,
)
# TextWorld's best rate of the three is the smallest.
RUNS += tuning.runs(keydoor.METHODS, {'textworld': 'test'}, [2.5e-5])
RUNS += tuning.runs(
  {'graphgpo': ',graphgpo'}, {'textworld': 'test'}, [2.5e-5, 7.5e-5]
)
RUNS += tuning.runs(
  keydoor.METHODS, {'gymnasium': 'test'}, [7.5e-5, 1.5e-4], seeds=[101, 102]
)
RUNS += tuning.runs(
  keydoor.METHODS,
  {'alfworld mini_full': 'valid_seen'},
  fields={'evaluation.num_tasks': 128},
)
_REQUESTS = {'seeds': [100, 101], 'fields': {'evaluation.num_tasks': 256}}
RUNS += tuning.runs(keydoor.METHODS, {'helpdesk': 'valid'}, **_REQUESTS)
# The largest rate of the three is the best one of these.
RUNS += tuning.runs(
  {'gigpo': '', 'grpo': ',grpo'}, {'helpdesk': 'valid'}, [6e-4], **_REQUESTS
)
