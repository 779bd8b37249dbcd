//! Conversion of a checkpoint to a safetensors file, as `elasticdl convert` asks for it.

use std::process::ExitCode;
use std::sync::Arc;

use crate::environment::{EXIT_DONE, EXIT_FAILED};
use crate::model::{Model, NamedTensor, tables_of, tensors_of};
use crate::{outputs, trained_model, weights};

/// A conversion that the environment of this process asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Conversion {
    from: String,
    to: String,
}

impl Conversion {
    /// Reads `ELASTICDL_CONVERT_FROM` and `ELASTICDL_CONVERT_TO`; `None` unless both are set.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let from = variable("ELASTICDL_CONVERT_FROM")?;
        Some(Self { from, to: variable("ELASTICDL_CONVERT_TO")? })
    }

    /// Converts, and prints an error.
    #[expect(clippy::print_stderr, reason = "a message to the user of `elasticdl convert`")]
    pub(crate) fn run<M: Model>(&self, model: &mut M) -> ExitCode {
        match self.convert(model) {
            Ok(()) => ExitCode::from(EXIT_DONE),
            Err(error) => {
                eprintln!("{error}");
                ExitCode::from(EXIT_FAILED)
            }
        }
    }

    fn convert<M: Model>(&self, model: &mut M) -> Result<(), String> {
        if !tables_of(model)?.is_empty() {
            return Err("a checkpoint of a model with tables can't be converted; train on with \
                        --resume-from and --export"
                .into());
        }
        self.write(&tensors_of(model)?)
    }

    /// Converts the parameters of a model with these tensors.
    pub(crate) fn write(&self, layout: &[NamedTensor]) -> Result<(), String> {
        trained_model::check(&self.from)?;
        outputs::check_model(&self.to)?;
        let mut parameters = vec![0.0; NamedTensor::count(layout)];
        trained_model::load(&self.from, layout, &mut parameters)?;
        weights::save(&self.to, layout, &Arc::new(parameters)).map_err(|error| error.to_string())
    }
}
