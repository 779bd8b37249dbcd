//! Launches the kernels of `kernels.cu`.

#![allow(unsafe_code, reason = "launches kernels, whose arguments this module checks")]

use std::sync::Arc;

use elasticdl::UserError;
use elasticdl::device::cudarc::driver::{
    CudaModule, CudaStream, CudaView, CudaViewMut, LaunchConfig, PushKernelArg,
};
use elasticdl::device::{self, Device};

/// The kernels, compiled for one GPU.
#[derive(Debug)]
pub(crate) struct Kernels {
    stream: Arc<CudaStream>,
    module: Arc<CudaModule>,
}

/// A kernel; `kernels.cu` says what it computes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kernel {
    InputGradient,
    Linear,
    LossGradient,
    Losses,
    Rectified,
    WeightGradient,
}

/// Number of records, and of a layer's inputs and outputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) records: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
}

impl Shape {
    /// Number of the layer's weights.
    pub(crate) fn weights(&self) -> usize {
        (self.inputs + 1) * self.outputs
    }
}

impl Kernels {
    /// Compiles the kernels with NVRTC.
    pub(crate) fn compile(device: &Device) -> Result<Self, UserError> {
        let stream = device.stream().clone();
        let code = device::compile(stream.context(), SOURCE, "gpu_mlp/kernels.cu")?;
        let module = stream.context().load_module(code)?;
        Ok(Self { stream, module })
    }

    /// Enqueues a kernel on the device's stream.
    ///
    /// # Panics
    /// If a slice does not have the length that the kernel expects.
    pub(crate) fn launch(
        &self,
        kernel: Kernel,
        shape: Shape,
        (a, b): (&CudaView<'_, f32>, &CudaView<'_, f32>),
        out: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), UserError> {
        let Shape { records, inputs, outputs } = shape;
        let (from, to, weights) = (records * inputs, records * outputs, shape.weights());
        let (name, expected) = match kernel {
            Kernel::InputGradient => ("input_gradient", [to, weights, from]),
            Kernel::Linear => ("linear", [from, weights, to]),
            Kernel::LossGradient => ("loss_gradient", [to, records, to]),
            Kernel::Losses => ("losses", [to, records, records]),
            Kernel::Rectified => ("rectified", [from, weights, to]),
            Kernel::WeightGradient => ("weight_gradient", [from, to, weights]),
        };
        assert_eq!([a.len(), b.len(), out.len()], expected, "{name}: lengths");
        let function = self.module.load_function(name)?;
        let config = LaunchConfig::for_num_elems(u32::try_from(out.len())?);
        let sizes = [records as u64, inputs as u64, outputs as u64];
        let mut launch = self.stream.launch_builder(&function);
        launch.arg(a).arg(b).arg(out).arg(&sizes[0]).arg(&sizes[1]).arg(&sizes[2]);
        // SAFETY: the arguments are those of all kernels, and have the lengths of this one.
        unsafe { launch.launch(config) }?;
        Ok(())
    }
}

const SOURCE: &str = include_str!("kernels.cu");
