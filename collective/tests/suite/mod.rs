//! The conformance suite as tests.

/// Defines one test module per backend.
macro_rules! conforms {
    ($form:expr; $($check:ident)*) => {
        $(
            #[test]
            fn $check() {
                conformance::$check(&$form);
            }
        )*
    };
    ($backend:ident, $exact:expr, $form:expr) => {
        mod $backend {
            use super::*;
            use elasticdl_collective::testing::conformance;

            #[test]
            fn sums_are_exact_and_identical_on_every_rank() {
                conformance::sums_are_exact_and_identical_on_every_rank(&$form, $exact);
            }

            conforms!($form;
                nan_and_infinity_have_the_same_bits_on_every_rank
                exchanges_deliver_every_payload
                parts_are_summed_where_they_belong
                any_sequence_of_operations_is_correct
                a_rank_that_leaves_after_an_operation_does_not_fail_the_others
                a_rank_that_ends_at_any_point_ends_all_without_wrong_results
                a_waiting_rank_can_be_aborted
                a_disagreement_fails_every_rank
                an_invalid_call_changes_nothing
            );
        }
    };
}
