//! Batches of records, with the ids of their rows.

use elasticdl_data::Reader;
use elasticdl_tables::Ids;

use crate::failure::call_user;
use crate::model::Model;

/// Builds a batch, and adds the ids of its rows.
pub(crate) fn feed<M: Model>(
    model: &mut M,
    records: Vec<<M::Reader as Reader>::Record>,
    ids: &mut Ids,
) -> Result<M::Batch, String> {
    let mut batch = call_user("feed()", || model.feed(records))?;
    let add_ids = || match model.as_table_model() {
        Some(model) => model.ids(&mut batch, ids),
        None => Err("as_table_model() returned another variant".into()),
    };
    call_user("ids()", add_ids)?;
    Ok(batch)
}
