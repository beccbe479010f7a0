"""The command ``typax``.

    typax check mypackage.types                          every value class and op of a module, against the laws
    typax quantize IN OUT --recipe int8                  a checkpoint, one tensor at a time
    typax inspect FILE                                   types, shapes, bytes
    typax compare A B                                    the error of every tensor
    typax convert IN OUT                                 another file format

Exit status: 0 if all is well, 1 if a file is not what it should be or something that was checked does not hold, 2 if the
command is used wrongly, 130 after Ctrl-C.
"""

try:
    import click
    import rich
except ImportError as e:
    raise SystemExit(f"the command typax needs {e.name}: pip install 'typax[cli]'") from None

from typax.cli._common import Commands
from typax.cli.check import check
from typax.cli.compare import compare
from typax.cli.files import convert, inspect, quantize


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="typax")
def main() -> None:
    """Hi types for JAX: laws of types, quantized files.

    For completion in the shell: eval "$(_TYPAX_COMPLETE=bash_source typax)", or zsh_source, fish_source.
    """


for _command in (check, quantize, inspect, compare, convert):
    main.add_command(_command)
