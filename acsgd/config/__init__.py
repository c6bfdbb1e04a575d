"""Every option of a run: dataclasses, checks across options, the run file, and spec strings of plug-ins."""
