"""Shapes of models that a plan can begin from scratch with.

`small`, `base` and `large` are the published T5 shapes (Raffel et al. 2020, arXiv 1910.10683, table of model sizes);
those with `-gated` are the v1.1 shapes, whose feed-forward layers are gated GELU. The smaller ones are this project's
own, for CPUs and few examples. Embeddings are tied in all of them. The vocabulary is at most the number given: this
project's public text has words for about 2,500 pieces, so the larger sizes want a text of the operator's own.

    size          parameters   d_model  d_kv  d_ff  layers  heads  vocabulary
    micro             0.05 M        32     8    64       1      4        1000
    mini              0.4 M         64    16   256       2      4        2500
    tiny              1.6 M        128    32   512       3      4        2000
    compact             8 M        256    64  1024       4      4        4000
    small              60 M        512    64  2048       6      8       32000
    base              223 M        768    64  3072      12     12       32000
    large             737 M       1024    64  4096      24     16       32000
    small-gated        60 M        512    64  1024       8      6       32000
    base-gated        223 M        768    64  2048      12     12       32000
    large-gated       750 M       1024    64  2816      24     16       32000
"""

from dataclasses import dataclass

from lorica_security.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`layers` of the encoder and of the decoder each; `vocabulary` pieces at most, unless the operator says
    otherwise."""

    d_model: int
    d_kv: int
    d_ff: int
    layers: int
    heads: int
    vocabulary: int
    gated: bool = False


SIZES: dict[str, Size] = {
    "micro": Size(d_model=32, d_kv=8, d_ff=64, layers=1, heads=4, vocabulary=1000),
    "mini": Size(d_model=64, d_kv=16, d_ff=256, layers=2, heads=4, vocabulary=2500),
    "tiny": Size(d_model=128, d_kv=32, d_ff=512, layers=3, heads=4, vocabulary=2000),
    "compact": Size(d_model=256, d_kv=64, d_ff=1024, layers=4, heads=4, vocabulary=4000),
    "small": Size(d_model=512, d_kv=64, d_ff=2048, layers=6, heads=8, vocabulary=32_000),
    "base": Size(d_model=768, d_kv=64, d_ff=3072, layers=12, heads=12, vocabulary=32_000),
    "large": Size(d_model=1024, d_kv=64, d_ff=4096, layers=24, heads=16, vocabulary=32_000),
    "small-gated": Size(d_model=512, d_kv=64, d_ff=1024, layers=8, heads=6, vocabulary=32_000, gated=True),
    "base-gated": Size(d_model=768, d_kv=64, d_ff=2048, layers=12, heads=12, vocabulary=32_000, gated=True),
    "large-gated": Size(d_model=1024, d_kv=64, d_ff=2816, layers=24, heads=16, vocabulary=32_000, gated=True),
}


def size_named(name: str) -> Size:
    """Raises ConfigurationError for a name that is not in the table."""
    if name not in SIZES:
        raise ConfigurationError(f"model size {name!r} is unknown: use one of {', '.join(SIZES)}")
    return SIZES[name]
