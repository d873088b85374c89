"""Warnings of torch's loaders name torch's file, as they do without the agent."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, dataloader


@pytest.mark.skipif(torch.cuda.is_available(), reason="with an accelerator there is no such warning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_warning_of_the_iterator_names_no_file_of_ours(observed, workers):
    loader = DataLoader(torch.arange(4), pin_memory=True, num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(loader)) == 4
    assert {warning.filename for warning in caught if "pin_memory" in str(warning.message)} == {dataloader.__file__}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with an accelerator there is no such warning")
def test_a_filter_for_torchs_module_still_fits(observed):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=".*pin_memory", module="torch.utils.data")
        list(DataLoader(torch.arange(4), pin_memory=True))
    assert [str(warning.message) for warning in caught if "pin_memory" in str(warning.message)] == []
