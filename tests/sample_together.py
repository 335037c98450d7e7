"""Samples in one of two processes; prints the tokens of its requests.

python tests/sample_together.py INDEX PORT TENSOR REUSE
"""

import sys

import distributed_test
import jax

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import parameters

if __name__ == '__main__':
  index, port, tensor = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
  reuse = sys.argv[4]
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(f'127.0.0.1:{port}', 2, index)
  mesh = mesh_lib.make_mesh(1, 2, 1)
  axes = mesh_lib.shardings(
    mesh, parameters.logical_axes(distributed_test.CONFIG)
  )
  host = distributed_test.make_params()
  params = jax.tree.map(
    lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i]),
    host,
    axes,
  )
  assert not params['embed'].is_fully_addressable
  long = distributed_test.LONG | {'reuse': reuse} if reuse != 'none' else {}
  engine = distributed_test.make_sampler(mesh, tensor=tensor, **long)
  assert engine.is_shared == (tensor == 2)
  engine.warm_up(params)
  compiled = engine.compilations
  if long:
    members = range(index, 8, 2)
    turns = distributed_test.play_conversations(engine, params, members)
    for ids in (ids for turn in turns for ids in turn):
      print('ids', *ids)
    assert engine.stats.reused_tokens
  else:
    requests = distributed_test.make_requests()[index::2]
    for completion in engine.generate(params, requests[: 4 - index]):
      print('ids', *completion.ids)
    # The first call has unequal numbers of requests; two per process remain.
    for request in requests[4 - index :]:
      for completion in engine.generate(params, [request]):
        print('ids', *completion.ids)
  assert engine.compilations == compiled, engine.compilations - compiled
