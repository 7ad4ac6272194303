"""Switches for training frameworks: one line puts the loss in place of the framework's."""
