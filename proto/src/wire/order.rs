//! What is shuffled, and the order of the records, on the wire.

use super::v1;
use crate::job::ShuffleMode;
use crate::order::OrderName;

pub(super) fn encode(order: OrderName) -> v1::Order {
    let OrderName { mode, seed, block, buffer } = order;
    v1::Order { mode: encode_mode(mode).into(), seed, block, buffer }
}

pub(super) fn decode(order: v1::Order) -> Result<OrderName, String> {
    let v1::Order { mode, seed, block, buffer } = order;
    match decode_mode(mode) {
        None | Some(ShuffleMode::Auto) => {
            Err("described.order.mode: must be what is shuffled, as a choice that is known".into())
        }
        Some(mode) => Ok(OrderName { mode, seed, block, buffer }),
    }
}

pub(super) fn encode_mode(mode: ShuffleMode) -> v1::ShuffleMode {
    match mode {
        ShuffleMode::Auto => v1::ShuffleMode::Auto,
        ShuffleMode::Block => v1::ShuffleMode::Block,
        ShuffleMode::None => v1::ShuffleMode::None,
        ShuffleMode::Record => v1::ShuffleMode::Record,
    }
}

/// `None` for a choice that is not known.
pub(super) fn decode_mode(mode: i32) -> Option<ShuffleMode> {
    Some(match v1::ShuffleMode::try_from(mode).ok()? {
        v1::ShuffleMode::Auto => ShuffleMode::Auto,
        v1::ShuffleMode::Block => ShuffleMode::Block,
        v1::ShuffleMode::None => ShuffleMode::None,
        v1::ShuffleMode::Record => ShuffleMode::Record,
    })
}
