"""Drop-in for `xlstm_jax.distributed.pipeline_parallel`."""

from meshwright.linen.pipeline_module import PipelineModule, execute_pipeline, execute_pipeline_step

__all__ = ["PipelineModule", "execute_pipeline", "execute_pipeline_step"]
