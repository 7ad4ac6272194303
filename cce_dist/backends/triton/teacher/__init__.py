"""A student's and a teacher's logits side by side: the forward of a distillation."""
