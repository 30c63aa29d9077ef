"""`lorica verify` and `lorica convert`: what may be asked of an exported model, and done with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorica_security.errors import ConfigurationError

if TYPE_CHECKING:
    from lorica.convert import Numbers

_Exported = Annotated[Path, typer.Argument(metavar="DIR", help="As coordinator export made it.", show_default=False)]


def verify(
    model: _Exported,
    key: Annotated[str, typer.Option(help="The coordinator's identity key, 64 hexadecimal digits.")] = "",
    silo: Annotated[
        Path | None, typer.Option(help="In place of --key: folder of an agent that is enrolled there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The signed statement, for programs.")] = False,
) -> None:
    """Check offline which plan and rounds made an exported model, and that no file of it was changed; exit with 5 if
    one was."""
    from lorica.verify import key_of, told
    from lorica_security.on_disk.provenance import verified

    provenance = verified(model, key_of(key, silo))
    print(provenance.statement.decode() if as_json else "\n".join(told(provenance)))


def convert(
    model: _Exported,
    target: Annotated[Path, typer.Argument(metavar="NEW", help="A new folder.", show_default=False)],
    numbers: Annotated[str, typer.Option(help="float32, float16, bfloat16, int16 or int8.")] = "float32",
) -> None:
    """Convert an exported model for CTranslate2, and say how far its answers are from PyTorch's; run `lorica verify`
    first."""
    from lorica.convert import convert as converted

    done = converted(model, target, _numbers(numbers))
    print(
        f"{target}: CTranslate2 with parameters in {done.numbers}, {done.after / 1e6:,.1f} MB where there were "
        f"{done.before / 1e6:,.1f}"
    )
    print(
        f"log-probabilities of tokens are at most {done.apart:.1g} nats from PyTorch's in float32, "
        f"{done.kept_apart:.1g} as kept; {done.same} of {done.tried} tokens of greedy answers are the same"
    )


def _numbers(name: str) -> "Numbers":
    from lorica.convert import Numbers

    try:
        return Numbers(name)
    except ValueError as error:
        raise ConfigurationError(f"--numbers {name!r} is unknown: use {', '.join(Numbers)}") from error
