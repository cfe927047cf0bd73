"""The table of contracts says what the wrappers' code takes for granted."""

from contracts import contract_lines, derived

from megatron_idempotent.patching.base import generated
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.contract import CONTRACTS, Contract, contract_of, contracts, unmet
from megatron_idempotent.patching.source import parse_body


def test_the_table_says_what_the_wrappers_take_for_granted():
    assert generated(CONTRACTS) == contract_lines(patches().values())
    for patch in patches().values():
        for target in patch.targets:
            assert contract_of(target.wrapper) == derived(target.wrapper), patch.id
    assert sum(bool(contract.unclear) for contract in contracts().values()) == 4


def test_a_wrapper_that_the_table_lacks_fits_no_body_that_nobody_reviewed():
    def wrapper(original, *args, **kwargs):
        return original(*args, **kwargs)

    body = parse_body("def run():\n    pass\n", "run")
    assert "contracts.txt lacks test_contracts:" in unmet(wrapper, body)
    assert derived(wrapper) == Contract(takes_all=True)
