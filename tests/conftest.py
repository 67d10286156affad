"""What all tests share: Hypothesis profiles, and small arrays."""

import os

from hypothesis import HealthCheck, settings

quick = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=60, **quick)
settings.register_profile("thorough", max_examples=1000, **quick)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
