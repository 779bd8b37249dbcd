//! Rows of a model's tables, in files beside the exported model.
//!
//! ```text
//!   m.safetensors                           the other parameters; its metadata names the parts
//!   m.safetensors.tables/
//!     00000-of-00002-DIGEST.safetensors     for each table: NAME, NAME.ids, NAME.touches
//!     00001-of-00002-DIGEST.safetensors
//! ```
//!
//! How many parts there are, which rows a part has and their order depend on the rows alone, so the
//! same rows are the same files at any number of workers.
//!
//! **Invariant:** the name of a part has the digest of its content, so an export changes no part
//! that another model has. The model's file is written after its parts.

mod index;
mod part;
mod rows;

pub(crate) use index::{
    ExportedPart, ExportedTables, NOTE, check_names, check_place, parquet_name, parts_of,
};
pub(crate) use part::write_part;
pub(crate) use rows::TrainedRows;

#[cfg(test)]
mod tests;
