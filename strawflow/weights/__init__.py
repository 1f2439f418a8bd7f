"""Weight files and checkpoint files: what they must hold, checked with numpy's and safetensors' formats alone, without torch."""
