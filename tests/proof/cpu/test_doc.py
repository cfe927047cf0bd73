"""The example in docs/cpu-runtime.md runs as it stands there."""

import importlib.util
import re
import sys
from pathlib import Path

DOC = Path(__file__).parents[3] / "docs" / "cpu-runtime.md"


def test_the_documented_example_passes(megatron_ranks, tmp_path, monkeypatch):
    text = DOC.read_text(encoding="utf-8")
    block = re.search(
        r"<!-- tests/proof/cpu/test_doc.py .*?-->\n```python\n(.*?)```", text, re.DOTALL
    )
    assert block is not None
    path = tmp_path / "test_documented_example.py"
    path.write_text(block[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    module.test_my_train_may_be_called_twice_with_overlap_on(megatron_ranks)
