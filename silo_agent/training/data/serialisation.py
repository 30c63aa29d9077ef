"""Text in and out of the model: how a question is put to it, and when its answer counts as exact (DESIGN section 3)."""

_KNOWLEDGE = " ; structured knowledge: "


def model_input(question: str, schema: str | None) -> str:
    """`{question} ; structured knowledge: {schema}`, or the question alone where `schema` is None.

    The question comes first, so that cutting an input that is too long at its end costs schema, not question.
    """
    return question if schema is None else f"{question}{_KNOWLEDGE}{schema}"


def normalised(sql: str) -> str:
    """`sql` as exact match compares it: lower case, single spaces, `'` for `"`, and exactly one ` ;` at the end."""
    body = " ".join(sql.lower().replace('"', "'").split())
    while body.endswith(";"):
        body = body[:-1].rstrip()
    return f"{body} ;".lstrip()


def exact_match(predicted: str, gold: str) -> bool:
    return normalised(predicted) == normalised(gold)
