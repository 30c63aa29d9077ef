"""The table of what goes with silos without labels is made of plans: each cell is refused by the rules it is about."""

import pytest
from pydantic import ValidationError

from lorica.documentation import semi_supervised_table as table


@pytest.mark.parametrize("way", table.WAYS)
@pytest.mark.parametrize("beside", table.BESIDE)
def test_what_is_refused_is_refused_for_silos_without_labels_alone(way: str, beside: str) -> None:
    """Each cell's plan without such silos is one, or there would be another reason."""
    with_both = table.goes(table.WAYS[way], table.BESIDE[beside])
    if with_both:
        return
    with pytest.raises(ValidationError) as caught:
        table.Plan.model_validate(table._values(table.WAYS[way], table.BESIDE[beside]))
    refusals = str(caught.value.errors()[0]["msg"]).split("; [")
    assert any("[semi_supervised]" in one or "semi_supervised]" in one for one in refusals)
