"""A token that comes in by stdin: a file, a pipe, or what a person pastes into a terminal."""

from typing import TextIO

from lorica_security.errors import ConfigurationError
from lorica_security.identity.enrolment_token import MAX_PASTED_CHARACTERS, EnrolmentToken, decode


def pasted_token(source: TextIO) -> EnrolmentToken:
    """As soon as the lines so far are a token; raises ConfigurationError at the end or at an empty line after some that
    are none."""
    text = ""
    while len(text) <= MAX_PASTED_CHARACTERS:
        line = source.readline(MAX_PASTED_CHARACTERS)
        text += line
        if not line or (text.strip() and not line.strip()):
            break
        try:
            return decode(text)
        except ConfigurationError:
            continue
    return decode(text)
