"""Low-rank adapters of a frozen network (arXiv:2106.09685).

y = W x + (alpha / rank) b (a x). The parameters hold the two matrices of an
adapter next to the adapted matrix NAME, as NAME_a [N, inputs.., R] and NAME_b
[N, R, outputs..]; those of experts follow the expert, [N, X, ..]. **N** layers,
**R** rank, **X** experts.
"""

import dataclasses

from gigpo_jax import options

TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')

# Suffixes of the names of an adapter's matrices.
A, B = '_a', '_b'

_VALUE_HEAD = 'value'


@dataclasses.dataclass(frozen=True)
class Lora:
  """Shape of the adapters.

  Attributes:
    rank: rank of the product b a.
    alpha: scale of the product times the rank.
    targets: names of the adapted matrices, a subset of TARGETS.
  """

  rank: int = options.number(0, low=0, note='0 trains the model')
  alpha: float = options.number(32.0, above=0)
  targets: tuple[str, ...] = options.field(
    TARGETS,
    lambda targets: len(targets) > 0 and set(targets) <= set(TARGETS),
    f'must be one or more of {", ".join(TARGETS)}',
  )

  def __post_init__(self):
    options.check(self)

  @property
  def scale(self) -> float:
    """Returns the scale of b (a x), alpha / rank."""
    return self.alpha / self.rank


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
