"""Print the table of methods and options, docs/methods.md."""

from gigpo_jax.runtime import output
from gigpo_jax.tools import method_table

if __name__ == '__main__':
  with output.handle():
    print(method_table.page(), end='')
