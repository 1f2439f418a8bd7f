"""Prompt files in, checked prompt rows out.

Public names: `PromptSource` (file and slice), `PromptKeys`, `read_prompts` with its `ReadReport`,
`PromptRow`, and its stored forms `to_record_batch`, `from_record_batch` and `to_json_line`.
"""

from strawflow.prompts.reader import ReadReport, count_records, read_prompts
from strawflow.prompts.row import PromptKeys, PromptRow, from_record_batch, to_json_line, to_record_batch
from strawflow.prompts.source import PromptSource

__all__ = [
    "PromptKeys",
    "PromptRow",
    "PromptSource",
    "ReadReport",
    "count_records",
    "from_record_batch",
    "read_prompts",
    "to_json_line",
    "to_record_batch",
]
