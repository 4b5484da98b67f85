"""The section `privacy` has the keys that its mechanisms declare, each of them once."""

from collections import Counter

import pytest

from perdure.config import PrivacyConfig, parse
from perdure.core.errors import UserError
from perdure.privacy import chain
from perdure.privacy.mechanism import Mechanism


class RoundingKeys(PrivacyConfig):
    digits: int = 0
    """Decimal digits that are left."""


class Rounding(Mechanism):
    key = "digits"
    keys = RoundingKeys


def test_every_key_belongs_to_one_mechanism():
    declared = Counter(key for kind in chain.all_mechanisms() for key in kind.keys.model_fields)
    assert set(declared) == set(PrivacyConfig.whole().model_fields)
    assert set(declared.values()) == {1}
    assert [kind.key for kind in chain.all_mechanisms()] == chain.MECHANISMS.names()
    assert set(chain.MECHANISMS.names()) <= set(declared)


def test_a_mechanism_brings_its_keys(monkeypatch):
    with pytest.raises(UserError, match=r"privacy\.digits: unknown key, got 3; allowed: secagg"):
        parse({"privacy": {"digits": 3}})
    monkeypatch.setattr(
        chain, "PrivacySection", chain.section_of([*chain.all_mechanisms(), Rounding])
    )
    privacy = parse({"privacy": {"digits": 3, "clip": 1.0}}).privacy
    assert (privacy.digits, privacy.clip, privacy.secagg) == (3, 1.0, False)
