//! Parameters in bf16 of the models of test programs.

use elasticdl::{HalfModel, UserError};

/// Parameters of a model of `--param-dtype bf16`, once it has begun.
#[derive(Clone, Debug, Default)]
pub struct HalfParameters {
    count: usize,
    bits: Vec<u16>,
}

impl HalfParameters {
    /// Of so many parameters.
    pub fn of(&mut self, count: usize) -> &mut dyn HalfModel {
        self.count = count;
        self
    }

    /// The parameters in f32, if these are not given: `[parameters]`.
    pub fn or_given(&self, given: &[f32]) -> Vec<f32> {
        match self.bits.is_empty() {
            true => given.to_vec(),
            false => self.bits.iter().map(|&bits| f32::from_bits(u32::from(bits) << 16)).collect(),
        }
    }
}

impl HalfModel for HalfParameters {
    fn begin(&mut self) -> Result<(), UserError> {
        self.bits = vec![0; self.count];
        Ok(())
    }

    fn read(&self, start: usize, bits: &mut [u16]) -> Result<(), UserError> {
        bits.copy_from_slice(&self.bits[start..start + bits.len()]);
        Ok(())
    }

    fn write(&mut self, start: usize, bits: &[u16]) -> Result<(), UserError> {
        self.bits[start..start + bits.len()].copy_from_slice(bits);
        Ok(())
    }
}
