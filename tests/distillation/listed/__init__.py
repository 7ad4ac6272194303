"""Tests of listed_distillation and teacher_topk."""
