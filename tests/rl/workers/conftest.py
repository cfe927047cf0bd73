"""Asserts of the contract are explained as those of tests are."""

import pytest

pytest.register_assert_rewrite("contract_ranks")
