//! The input of an update of the parameters.

/// One step's gradient and the state it is applied to.
#[derive(Debug)]
#[non_exhaustive]
pub struct Update<'a> {
    /// Number of the step, from 0.
    pub step: u64,
    /// Number of records in `sum`, over all ranks; at least 1.
    pub records: u64,
    /// Gradient, summed over these records: `[parameter_count()]`.
    pub sum: &'a [f32],
    /// Parameters: `[parameter_count()]`.
    pub parameters: &'a mut [f32],
    /// Optimizer state: `[slots() · parameter_count()]`, initially zero.
    pub slots: &'a mut [f32],
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
        Self { step, records, sum, parameters, slots }
    }
}
