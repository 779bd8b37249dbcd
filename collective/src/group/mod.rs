//! Groups of one generation, and the endpoint that connects them.

pub(crate) mod attempt;
pub(crate) mod endpoint;
pub(crate) mod exchange;
pub(crate) mod host_group;
pub(crate) mod pairs;
pub(crate) mod spec;
