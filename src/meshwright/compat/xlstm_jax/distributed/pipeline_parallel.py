"""Drop-in for `xlstm_jax.distributed.pipeline_parallel`; the code is in `meshwright.linen.pipeline_module`."""

from meshwright.linen.pipeline_module import PipelineModule, execute_pipeline, execute_pipeline_step

__all__ = ["PipelineModule", "execute_pipeline", "execute_pipeline_step"]
