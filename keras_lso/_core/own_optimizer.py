"""`OwnOptimizer`: the base of LARS, LAMB and NovoGrad."""

from keras_lso._core.gradients import check_gradients
from keras_lso._core.state_file import LoadsAllOrNothing
from keras_lso._core.wrapper import like
from keras_lso._keras_internals.rule_optimizer import RuleOptimizer


class OwnOptimizer(LoadsAllOrNothing, RuleOptimizer):
    """An optimizer whose step is a rule, and that looks at what it is given."""

    def apply(self, grads, trainable_variables=None):
        """Updates the variables.

        Args:
            grads: List of gradients, one for each variable; None where a variable
                has none. Integers count as float32.
            trainable_variables: List of variables. Defaults to those that the
                optimizer was built for; the first call builds it.

        Raises:
            TypeError: If one of the two is no list, or if they are swapped.
            ValueError: If the gradients are not those of the variables, by their number
                or shapes, or if one is complex.
        """
        super().apply(*check_gradients(self, grads, trainable_variables))

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        """Does what `apply` does, on values that come in and go out.

        Args:
            optimizer_variables: List of tensors, the values of
                `optimizer.variables`.
            grads: List of gradients, one for each trainable variable.
            trainable_variables: List of tensors, the values of the variables that
                the optimizer was built for.

        Returns:
            A tuple of the new values of `trainable_variables` and of
            `optimizer_variables`.
        """
        trained, own = super().stateless_apply(
            optimizer_variables, grads, trainable_variables
        )
        return trained, like(optimizer_variables, own)
