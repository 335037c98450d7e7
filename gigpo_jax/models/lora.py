"""Low-rank adapters of a frozen network (arXiv:2106.09685).

y = W x + (alpha / rank) b (a x). The parameters hold the two matrices of an
adapter next to the adapted matrix NAME, as NAME_a [N, inputs.., R] and NAME_b
[N, R, outputs..]; those of experts follow the expert, [N, X, ..]. The rank axis
can hold the adapters of several agents side by side. Each token then uses the
adapter of its agent only, and only that adapter gets its gradient. **N**
layers, **R** rank times the number of adapters, **X** experts.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp

from gigpo_jax import options

TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')

# Targets that all together also stand for a joint matrix of other layers.
_JOINT = {'qkvz': ('q', 'k', 'v')}

# Suffixes of the names of an adapter's matrices.
A, B = '_a', '_b'

_VALUE_HEAD = 'value'
# Names of agents, which are also names of folders.
_AGENT = re.compile(r'\w[\w .-]*')


def _are_agents(agents: tuple[str, ...]) -> bool:
  named = all(isinstance(a, str) and _AGENT.fullmatch(a) for a in agents)
  return named and len(agents) != 1 and len(set(agents)) == len(agents)


@dataclasses.dataclass(frozen=True)
class Lora:
  """Shape of the adapters.

  Attributes:
    rank: rank of the product b a.
    alpha: scale of the product times the rank.
    targets: names of the adapted matrices, a subset of TARGETS.
    agents: names of the agents, each with an adapter of its own; (): one
      adapter for all.
  """

  rank: int = options.number(0, low=0, note='0 trains the model')
  alpha: float = options.number(32.0, above=0)
  targets: tuple[str, ...] = options.field(
    TARGETS,
    lambda targets: 0 < len(targets) == len(set(targets) & set(TARGETS)),
    f'must be one or more of {", ".join(TARGETS)}, each once',
  )
  agents: tuple[str, ...] = options.field(
    (),
    _are_agents,
    'must be two or more different names of letters, digits and spaces, or ()',
  )

  def __post_init__(self):
    options.check(self)

  def adapts(self, name: str) -> bool:
    """Returns whether a matrix has an adapter, by its name."""
    return {*_JOINT.get(name, (name,))} <= {*self.targets}

  @property
  def scale(self) -> float:
    """Returns the scale of b (a x), alpha / rank."""
    return self.alpha / self.rank

  @property
  def width(self) -> int:
    """Returns R, the size of the rank axis: the ranks of all adapters."""
    return self.rank * max(len(self.agents), 1)


def select(lora: Lora, low: jax.Array, agents: jax.Array | None) -> jax.Array:
  """Returns activations a x [.., R] without those of other agents' adapters.

  Args:
    lora: shape of the adapters.
    low: activations of tokens.
    agents: index of each token's agent [..]; None with one adapter.
  """
  if not lora.agents:
    return low
  owners_R = jnp.arange(lora.width) // lora.rank
  return jnp.where(agents[..., None] == owners_R, low, 0)


def by_agent(lora: Lora | None, params: dict) -> dict[str, dict]:
  """Returns the parameters of each agent, by its name.

  Args:
    lora: shape of the adapters; None: there are none.
    params: adapters of all agents; other parameters stay.

  Returns:
    {'': params} if all agents have the same parameters.
  """
  if lora is None or not lora.agents:
    return {'': params}
  return {
    agent: _of_agent(params, slice(n * lora.rank, (n + 1) * lora.rank))
    for n, agent in enumerate(lora.agents)
  }


def _of_agent(params: dict, ranks: slice, dims: int = 1) -> dict:
  """Returns parameters with some columns of the adapters' rank axes only.

  Args:
    params: adapters, and possibly other parameters, which stay.
    ranks: the columns.
    dims: number of leading dimensions of a matrix, for layers and experts.
  """
  own = {}
  for name, leaf in params.items():
    if isinstance(leaf, dict):
      own[name] = _of_agent(leaf, ranks, 2 if name == 'experts' else 1)
    elif name.endswith(A):
      own[name] = leaf[..., ranks]
    elif name.endswith(B):
      own[name] = leaf[(slice(None),) * dims + (ranks,)]
    else:
      own[name] = leaf
  return own


def for_agent(lora: Lora) -> Lora:
  """Returns the shape of the adapters of one agent."""
  return dataclasses.replace(lora, agents=())


def split(params: dict) -> tuple[dict, dict]:
  """Splits parameters into (adapters, base parameters), both nested dicts.

  A critic's value head counts as an adapter, since it is trained.
  """
  adapters, rest = {}, {}
  for name, leaf in params.items():
    if isinstance(leaf, dict):
      inner, outer = split(leaf)
      adapters |= {name: inner} if inner else {}
      rest |= {name: outer} if outer else {}
    elif name.endswith((A, B)) or name == _VALUE_HEAD:
      adapters[name] = leaf
    else:
      rest[name] = leaf
  return adapters, rest


def combine(one: dict, other: dict) -> dict:
  """Merges two nested dicts with different leaves; the inverse of `split`."""
  combined = dict(one)
  for name, leaf in other.items():
    combined[name] = combine(one[name], leaf) if name in one else leaf
  return combined


def merge(lora: Lora, params: dict, dims: int = 1) -> dict:
  """Returns base parameters with the adapters' products added to the matrices.

  The sum is in the adapters' type, float32; each matrix keeps its type.

  Args:
    lora: shape of the adapters.
    params: base parameters and adapters.
    dims: number of leading dimensions of a matrix, for layers and experts.
  """
  merged = {}
  for name, leaf in params.items():
    if isinstance(leaf, dict):
      merged[name] = merge(lora, leaf, 2 if name == 'experts' else 1)
    elif name + A in params:
      a, b = params[name + A], params[name + B]
      leading, rank = a.shape[:dims], lora.rank
      product = a.reshape(*leading, -1, rank) @ b.reshape(*leading, rank, -1)
      matrix = leaf + lora.scale * product.reshape(leaf.shape)
      merged[name] = matrix.astype(leaf.dtype)
    elif not name.endswith((A, B)):
      merged[name] = leaf
  return merged
