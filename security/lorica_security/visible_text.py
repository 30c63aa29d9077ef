"""Text of others in words of our own: an error, a finding."""


def visible(text: str) -> str:
    """On one line, with escapes for whatever does not print: control characters, line ends, marks that turn the
    direction of text."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )
