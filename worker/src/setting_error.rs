//! Settings that are out of range.

/// A setting of an optimizer or a schedule that is out of its range. Correct it where the model
/// makes its optimizer.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{setting} is {value}, but must be {range}")]
#[non_exhaustive]
pub struct SettingError {
    /// Name of the setting.
    pub setting: &'static str,
    /// Its value.
    pub value: f64,
    /// The values that are accepted.
    pub range: &'static str,
}

impl SettingError {
    pub(crate) fn unless(
        is_valid: bool,
        setting: &'static str,
        value: f64,
        range: &'static str,
    ) -> Result<(), Self> {
        if is_valid { Ok(()) } else { Err(Self { setting, value, range }) }
    }

    pub(crate) fn unless_finite(setting: &'static str, value: f64) -> Result<(), Self> {
        let is_valid = value >= 0.0 && value.is_finite();
        Self::unless(is_valid, setting, value, "at least 0 and finite")
    }

    pub(crate) fn unless_fraction(setting: &'static str, value: f64) -> Result<(), Self> {
        Self::unless((0.0..1.0).contains(&value), setting, value, "at least 0 and below 1")
    }
}
