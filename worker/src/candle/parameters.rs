//! The parameters that a network asks candle's [`VarBuilder`] for, in one flat slice.

use std::collections::BTreeMap;
use std::f64::consts::TAU;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor, Var, bail,
};
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use candle_nn::var_builder::{SimpleBackend, VarBuilder};
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};

use crate::metrics::UserError;

/// The parameters of a network, in the order in which it asked for them.
#[derive(Debug, Default)]
pub(super) struct Parameters {
    pub(super) declared: Vec<Declared>,
    pub(super) variables: Vec<Var>,
    /// Number of elements of all tensors.
    pub(super) len: usize,
    /// Whether the variables are bf16, not f32.
    pub(super) are_half: bool,
}

/// A parameter tensor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Declared {
    /// Name, unique within the model.
    pub name: String,
    /// Shape; the elements are in row-major order.
    pub shape: Vec<usize>,
    /// Distribution of the initial values. The values depend only on the job's seed, the index of
    /// the tensor in the order of declaration, and its shape.
    pub init: Init,
    /// Range in the flat slice of all parameters.
    pub range: Range<usize>,
}

impl Parameters {
    /// Builds a network on `device`. Returns the parameters that it asked for, of type `dtype`, all
    /// 0.
    pub(super) fn of<N>(
        (device, dtype): (&Device, DType),
        build: impl FnOnce(VarBuilder<'static>) -> Result<N, UserError>,
    ) -> (Self, Result<N, UserError>) {
        let parameters = Self { are_half: dtype == DType::BF16, ..Self::default() };
        let open = Arc::new(Mutex::new(Some(Open { parameters, indices: BTreeMap::new() })));
        let backend: Box<dyn SimpleBackend> = Box::new(Declarations(Arc::clone(&open), dtype));
        let network = build(VarBuilder::from_backend(backend, dtype, device.clone()));
        let parameters = lock(&open).take().map(|open| open.parameters).unwrap_or_default();
        (parameters, network)
    }

    /// Copies `values`, `[len]`, into the variables, unless these are [half](Self::are_half).
    pub(super) fn set(&self, values: &[f32]) -> Result<(), UserError> {
        if self.are_half {
            return Ok(());
        }
        if values.len() != self.len {
            let (given, declared) = (values.len(), self.len);
            return Err(format!("got {given} parameters, but the network has {declared}").into());
        }
        for (declared, variable) in self.declared.iter().zip(&self.variables) {
            variable.inplace_op1(&Overwrite(&values[declared.range.clone()]))?;
        }
        Ok(())
    }

    /// Calls `copy` for each variable with some of the `len` elements from `start` on: with these
    /// elements, and their place in the range.
    fn for_each_in(
        &self,
        start: usize,
        len: usize,
        mut copy: impl FnMut(Tensor, Range<usize>) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        for (Declared { range, .. }, variable) in self.declared.iter().zip(&self.variables) {
            let (from, to) = (range.start.max(start), range.end.min(start + len));
            if from < to {
                let elements = variable.as_tensor().detach().flatten_all()?;
                let elements = elements.narrow(0, from - range.start, to - from)?;
                copy(elements, from - start..to - start)?;
            }
        }
        Ok(())
    }

    /// Copies the variables, which are [half](Self::are_half), from element `start` on.
    pub(super) fn read(&self, start: usize, bits: &mut [u16]) -> candle_core::Result<()> {
        self.for_each_in(start, bits.len(), |elements, place| {
            let (storage, layout) = elements.storage_and_layout();
            match (&*storage, layout.contiguous_offsets()) {
                (Storage::Cpu(CpuStorage::BF16(values)), Some((from, to))) => {
                    bits[place].copy_from_slice(bytemuck::cast_slice(&values[from..to]));
                    Ok(())
                }
                _ => bail!("a parameter must be a contiguous tensor of bf16"),
            }
        })
    }

    /// Overwrites the variables, which are [half](Self::are_half), from element `start` on.
    pub(super) fn write(&self, start: usize, bits: &[u16]) -> candle_core::Result<()> {
        self.for_each_in(start, bits.len(), |elements, place| {
            elements.inplace_op1(&OverwriteHalf(&bits[place]))
        })
    }
}

impl Declared {
    /// Draws the initial values. `stream`: index of the tensor.
    pub(super) fn draw(&self, seed: u64, stream: u64, values: &mut [f32]) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        // One random stream per tensor, so its values do not depend on the sizes of earlier
        // tensors.
        random.set_stream(stream);
        let mut fraction = || (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut normal = |mean: f64, stdev: f64, values: &mut [f32]| {
            // Box & Muller, A Note on the Generation of Random Normal Deviates (1958); ln of
            // (0, 1], not of 0.
            for pair in values.chunks_mut(2) {
                let radius = stdev * (-2.0 * (1.0 - fraction()).ln()).sqrt();
                let (sin, cos) = (TAU * fraction()).sin_cos();
                for (value, part) in pair.iter_mut().zip([cos, sin]) {
                    *value = (mean + radius * part) as f32;
                }
            }
        };
        match self.init {
            Init::Const(value) => values.fill(value as f32),
            Init::Kaiming { dist, fan, non_linearity } => {
                let fan = fan.for_shape(&Shape::from(self.shape.as_slice()));
                let stdev = non_linearity.gain() / (fan as f64).sqrt();
                match dist {
                    NormalOrUniform::Normal => normal(0.0, stdev, values),
                    NormalOrUniform::Uniform => {
                        let bound = 3f64.sqrt() * stdev;
                        values.fill_with(|| (bound * (2.0 * fraction() - 1.0)) as f32);
                    }
                }
            }
            Init::Randn { mean, stdev } => normal(mean, stdev, values),
            Init::Uniform { lo, up } => values.fill_with(|| (lo + (up - lo) * fraction()) as f32),
        }
    }
}

/// Parameters while their network is being built.
#[derive(Debug, Default)]
struct Open {
    parameters: Parameters,
    /// Index of each name.
    indices: BTreeMap<String, usize>,
}

/// Declares each parameter that is asked for; `None` once the network is built.
#[derive(Debug)]
struct Declarations(Arc<Mutex<Option<Open>>>, DType);

impl SimpleBackend for Declarations {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        if dtype != self.1 {
            let own = self.1.as_str();
            return refused(format!(
                "parameter {name}: {dtype:?}; parameters are {own}: convert the tensor after it"
            ));
        }
        if name.ends_with("running_mean") || name.ends_with("running_var") {
            return refused(format!(
                "parameter {name}: running statistics of batch normalization are not trained, and \
                 workers do not exchange them; use a layer or group normalization"
            ));
        }
        let mut open = lock(&self.0);
        let Some(Open { parameters, indices }) = open.as_mut() else {
            return refused(format!(
                "parameter {name}: ask for all parameters before build() returns"
            ));
        };
        if let Some(&index) = indices.get(name) {
            let known = &parameters.variables[index];
            if known.shape() != &shape {
                return refused(format!(
                    "two parameters named {name}, of the shapes {:?} and {shape:?}",
                    known.dims()
                ));
            }
            // A name that is asked for again is the same tensor, as with candle's `VarMap`.
            return Ok(known.as_tensor().clone());
        }
        let variable = Var::zeros(&shape, dtype, device)?;
        let range = parameters.len..parameters.len + variable.elem_count();
        parameters.len = range.end;
        indices.insert(name.to_owned(), parameters.variables.len());
        let (name, shape) = (name.to_owned(), shape.into_dims());
        parameters.declared.push(Declared { name, shape, init, range });
        parameters.variables.push(variable.clone());
        Ok(variable.into_inner())
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let open = lock(&self.0);
        let known = open.as_ref().and_then(|open| {
            open.indices.get(name).map(|&index| open.parameters.variables[index].as_tensor())
        });
        match known {
            Some(tensor) => Ok(tensor.clone()),
            None => refused(format!("parameter {name}: a parameter that is trained needs a shape")),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        lock(&self.0).as_ref().is_some_and(|open| open.indices.contains_key(name))
    }
}

/// Each declaration is complete before the next one, so that a panic leaves no half of one.
fn lock(open: &Mutex<Option<Open>>) -> MutexGuard<'_, Option<Open>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error without the backtrace that candle adds on request, as the text is for users.
fn refused<T>(text: String) -> candle_core::Result<T> {
    Err(candle_core::Error::Msg(text))
}

/// Overwrites elements of a variable in bf16 in place.
struct OverwriteHalf<'a>(&'a [u16]);

impl InplaceOp1 for OverwriteHalf<'_> {
    fn name(&self) -> &'static str {
        "overwrite-half"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        match (storage, layout.contiguous_offsets()) {
            (CpuStorage::BF16(values), Some((start, end))) => {
                values[start..end].copy_from_slice(bytemuck::cast_slice(self.0));
                Ok(())
            }
            _ => bail!("a parameter must be a contiguous tensor of bf16"),
        }
    }
}

/// Overwrites a variable's values in place.
struct Overwrite<'a>(&'a [f32]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        match (storage, layout.contiguous_offsets()) {
            (CpuStorage::F32(values), Some((start, end))) => {
                values[start..end].copy_from_slice(self.0)
            }
            _ => bail!("a parameter must be a contiguous tensor of f32"),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &mut candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("a parameter must be a contiguous tensor of f32")
        };
        let device = storage.device.clone();
        device.memcpy_htod(self.0, &mut storage.as_cuda_slice_mut::<f32>()?.slice_mut(start..end))
    }
}
