//! Conversion of a checkpoint to a safetensors file, and of exported rows to Parquet files, as
//! `elasticdl convert` asks for it.

use std::fs;
use std::process::ExitCode;
use std::sync::Arc;

use elasticdl_data::storage::Storage;
use elasticdl_tables::Table;

use crate::environment::{EXIT_DONE, EXIT_FAILED};
use crate::exported_tables::parquet_name;
use crate::model::{Model, NamedTensor, tables_of, tensors_of};
use crate::{outputs, trained_model, weights};

/// A conversion that the environment of this process asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Conversion {
    from: String,
    to: String,
    /// The file whose presence says that all is written.
    done: Option<String>,
}

impl Conversion {
    /// Reads `ELASTICDL_CONVERT_FROM`, `ELASTICDL_CONVERT_TO` and, with which the command knows
    /// that the program has converted, `ELASTICDL_CONVERT_DONE`. `None` unless the first two are
    /// set.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let from = variable("ELASTICDL_CONVERT_FROM")?;
        let to = variable("ELASTICDL_CONVERT_TO")?;
        Some(Self { from, to, done: variable("ELASTICDL_CONVERT_DONE") })
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
        let tables = tables_of(model)?;
        self.write(&tensors_of(model)?, &tables)
    }

    /// Converts the model of a program with these tensors and tables.
    pub(crate) fn write(&self, layout: &[NamedTensor], tables: &[Table]) -> Result<(), String> {
        self.write_files(layout, tables)?;
        match &self.done {
            Some(done) => fs::write(done, "").map_err(|error| format!("write {done}: {error}")),
            None => Ok(()),
        }
    }

    fn write_files(&self, layout: &[NamedTensor], tables: &[Table]) -> Result<(), String> {
        trained_model::check(&self.from)?;
        if self.to.trim_end_matches('/').ends_with(".parquet") {
            return self.write_rows(tables);
        }
        if !tables.is_empty() {
            return Err("a checkpoint of a model with tables can't be converted; train on with \
                        --resume-from and --export, and convert the rows to a folder NAME.parquet"
                .into());
        }
        let mut parameters = vec![0.0; NamedTensor::count(layout)];
        trained_model::load(&self.from, layout, &mut parameters)?;
        // The check makes the folder of the file.
        outputs::check_model(&self.to)?;
        weights::save(&self.to, layout, &Arc::new(parameters)).map_err(|error| error.to_string())
    }

    /// Writes the rows of an exported model as Parquet, a file for each table.
    fn write_rows(&self, tables: &[Table]) -> Result<(), String> {
        let Self { from, to, .. } = self;
        let mut rows = trained_model::rows(from, tables)?
            .ok_or_else(|| format!("{from} has no tables, whose rows {to} would have"))?;
        let files = tables.iter().map(|table| parquet_name(&table.name));
        let files = files.collect::<Result<Vec<String>, _>>()?;
        let folder = Storage::open(to).map_err(|error| error.to_string())?;
        let found = folder.list("").map_err(|error| error.to_string())?;
        // Files of two models would look like one.
        if let Some(other) = found.first() {
            return Err(format!(
                "{to} has {:?} already, and a conversion to Parquet replaces nothing; name another \
                 folder, or remove it",
                other.path
            ));
        }
        files.iter().try_for_each(|file| outputs::check_file(folder.join(file).address()))?;
        rows.write_parquet(&folder, &files).inspect_err(|_| {
            files.iter().for_each(|file| drop(folder.remove(file)));
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversion_of_another_model_makes_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let layout = |len: usize| [NamedTensor::new("w", [len])];
        weights::save(&at("m"), &layout(2), &Arc::new(vec![1.0, 2.0])).unwrap();
        let conversion = Conversion { from: at("m"), to: at("new/n"), done: None };
        assert!(conversion.write(&layout(3), &[]).is_err());
        assert!(!folder.path().join("new").exists());
        conversion.write(&layout(2), &[]).unwrap();
        assert_eq!(fs::read(at("new/n")).unwrap(), fs::read(at("m")).unwrap());
    }
}
