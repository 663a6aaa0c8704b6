"""A pytest plugin: the first failing example is enough, however long it is."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile("no shrinking", phases=[Phase.explicit, Phase.generate])
settings.load_profile("no shrinking")
