//! Models on a GPU in a program without the feature `gpu`: there are none.

use crate::device::NoMemory;
use crate::metrics::{Loss, Metrics, UserError};
use crate::model::Model;
use crate::optimizer::Optimizer;
use crate::update::UpdateRule;

/// No value.
#[derive(Debug)]
pub(super) enum NoModel {}

pub(crate) fn is_on_gpu<M: Model>(_: &mut M) -> bool {
    false
}

pub(super) fn device_of<M: Model>(_: &mut M) -> Result<NoModel, UserError> {
    Err("this program was built without the feature `gpu`".into())
}

impl NoModel {
    pub(super) fn gradients<B>(
        &self,
        _: &NoMemory,
        _: B,
        _: &mut NoMemory,
    ) -> Result<Loss, UserError> {
        match *self {}
    }

    pub(super) fn evaluate<B>(
        &self,
        _: &NoMemory,
        _: B,
        _: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        match *self {}
    }
}

pub(super) fn update<M: Model>(
    _: &mut M,
    update: NoMemory,
    _: &mut dyn UpdateRule,
) -> Result<(), UserError> {
    match update {}
}

pub(super) fn optimizer_of<M: Model>(_: &mut M, _: &dyn UpdateRule) -> Option<Optimizer> {
    None
}
