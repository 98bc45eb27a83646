"""Building blocks of models. Layers reach state only through the step's `StepContext`."""
