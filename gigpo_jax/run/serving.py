"""The pool of a training run whose episodes a harness plays."""

import contextlib
import socket
from collections.abc import Iterator, Sequence

import ml_collections

import envs
from gigpo_jax import builders, endpoint, endpoint_server, tokenizer
from gigpo_jax.runtime import distributed, web


@contextlib.contextmanager
def open_pool(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  *,
  listening: socket.socket,
  host: str,
  names: Sequence[str],
  token: str,
  max_bytes: int,
  max_requests_per_sec: float,
) -> Iterator[endpoint.EndpointPool]:
  """Serves the episodes of a training run; yields their pool.

  Prints the address.

  Args:
    config: the experiment.
    text: tokenizer of the policy.
    listening: the socket.
    host: the host name or address that it listens on.
    names: further host names that requests may use.
    token: see `endpoint_server.application`.
    max_bytes: see there.
    max_requests_per_sec: see there.

  Raises:
    ValueError: in one line, if there are several processes.
  """
  if distributed.is_multi_process():
    raise ValueError(
      f'env.name={config.env.name}: one process serves and trains; must be one '
      'process'
    )
  with endpoint.EndpointPool(
    text.decode,
    num_envs=builders.num_envs(config),
    max_steps=config.env.max_steps,
    has_tools=envs.uses_tools(config.env.name, config.env),
    step_timeout_secs=config.pool.step_timeout_secs,
    reset_timeout_secs=config.pool.reset_timeout_secs,
  ) as pool:
    app = endpoint_server.application(
      pool,
      token=token,
      names=(host, *names),
      max_bytes=max_bytes,
      max_requests_per_sec=max_requests_per_sec,
    )
    with endpoint_server.serve(app, listening, pool.num_envs):
      address = web.url(host, listening.getsockname()[1])
      print(f'waiting for a harness at {address}', flush=True)
      yield pool
