//! How a step's gradient changes the parameters.

use crate::metrics::UserError;
use crate::optimizer::Optimizer;

/// How a step's gradient changes the parameters. [`Sgd`](crate::Sgd), [`Adam`](crate::Adam),
/// [`AdamW`](crate::AdamW) and [`Optimizer`] are rules; each applies the mean over the step's
/// records. Implement this trait for a rule of your own:
///
/// ```
/// use elasticdl::{Update, UpdateRule, UserError};
///
/// /// The sign of a running mean of the gradient (Lion, Chen et al., 2023, without weight decay).
/// struct Lion;
///
/// impl UpdateRule for Lion {
///     fn slots(&self) -> usize {
///         1
///     }
///     fn learning_rate(&self, _step: u64) -> Option<f64> {
///         Some(1e-4)
///     }
///     fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
///         let Update { records, sum, parameters, slots, .. } = update;
///         for ((parameter, mean), sum) in parameters.iter_mut().zip(slots).zip(sum) {
///             let gradient = sum / records as f32;
///             *parameter -= 1e-4 * (0.9 * *mean + 0.1 * gradient).signum();
///             *mean = 0.99 * *mean + 0.01 * gradient;
///         }
///         Ok(())
///     }
/// }
///
/// let (mut parameters, mut slots) = ([1.0, 1.0], [0.0, 0.0]);
/// Lion.apply(Update::new(0, 8, &[4.0, -4.0], &mut parameters, &mut slots)).unwrap();
/// assert_eq!(parameters, [0.9999, 1.0001]);
/// ```
///
/// Whatever the rule remembers belongs in [`Update::slots`]: a worker that joins receives
/// parameters and slots, and a checkpoint has them.
pub trait UpdateRule: 'static {
    /// Number of `f32`s of state per parameter.
    fn slots(&self) -> usize;

    /// Number of `f32`s of state of this many parameters. A program's may have a part that does not
    /// grow with them.
    #[doc(hidden)]
    fn state_len(&self, parameters: usize) -> usize {
        self.slots() * parameters
    }

    /// The learning rate of `step`, from 0, for the progress line and the metrics. Default: none.
    fn learning_rate(&self, _step: u64) -> Option<f64> {
        None
    }

    /// Whether each parameter, and its slots, change as a function of themselves and of their own
    /// element of the sum alone, apart from the step and the number of records. Then parts of the
    /// parameters can be updated on different workers, each with an [`apply`](Self::apply) of its
    /// own. Default: no.
    fn is_elementwise(&self) -> bool {
        false
    }

    /// The first parameter whose gradient counts in the norm to which the rule clips, if it does.
    #[doc(hidden)]
    fn clipped_from(&self) -> Option<usize> {
        self.as_optimizer()?.norm_limit().map(|_| 0)
    }

    /// Applies one step's gradient.
    ///
    /// # Errors
    /// An error ends this worker.
    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError>;

    /// The rule as an optimizer, which has a GPU side and settings to check, if it is one.
    #[doc(hidden)]
    fn as_optimizer(&self) -> Option<Optimizer> {
        None
    }
}

impl<T: Copy + Into<Optimizer> + 'static> UpdateRule for T {
    fn slots(&self) -> usize {
        (*self).into().slots()
    }

    fn learning_rate(&self, step: u64) -> Option<f64> {
        Some((*self).into().learning_rate(step))
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        (*self).into().apply(update);
        Ok(())
    }

    fn as_optimizer(&self) -> Option<Optimizer> {
        Some((*self).into())
    }
}

/// One step's gradient and the state it is applied to.
#[derive(Debug)]
#[non_exhaustive]
pub struct Update<'a> {
    /// Number of the step, from 0.
    pub step: u64,
    /// Number of records in `sum`, over all ranks; at least 1.
    pub records: u64,
    /// Gradient, summed over these records: `[parameters]`.
    pub sum: &'a [f32],
    /// Parameters: `[parameters]`.
    pub parameters: &'a mut [f32],
    /// Optimizer state: `[slots() · parameters]`, initially zero.
    pub slots: &'a mut [f32],
    /// Euclidean norm of the whole sum, if `sum` is a part of it and the optimizer clips.
    pub(crate) norm: Option<f64>,
}

impl<'a> Update<'a> {
    /// An update for a loop or a test of your own; each argument as the field of its name.
    pub fn new(
        step: u64,
        records: u64,
        sum: &'a [f32],
        parameters: &'a mut [f32],
        slots: &'a mut [f32],
    ) -> Self {
        Self { step, records, sum, parameters, slots, norm: None }
    }
}
