"""`OwnOptimizer`: the base of LARS, LAMB and NovoGrad."""

from keras_lso._backend import backend
from keras_lso._checks import check_callable_rate
from keras_lso._core.exclusions import (
    by_names,
    check_exclusions,
    warn_of_idle_patterns,
)
from keras_lso._core.gradients import as_list, check_gradients, check_trainable
from keras_lso._core.state_file import LoadsAllOrNothing
from keras_lso._core.wrapper import like
from keras_lso._keras_internals.rule_optimizer import RuleOptimizer
from keras_lso._keras_internals.variables import own_in_scope


class OwnOptimizer(LoadsAllOrNothing, RuleOptimizer):
    """An optimizer whose step is a rule, and that looks at what it is given."""

    @RuleOptimizer.learning_rate.setter
    def learning_rate(self, value):
        """The learning rate of the next step."""
        value = check_callable_rate("learning_rate", value)
        RuleOptimizer.learning_rate.fset(self, value)

    # A wrapper need not look at its patterns.
    _looks_at_patterns = True

    def build(self, variables):
        """Creates the slots of each variable, and sorts out who is excluded.

        Args:
            variables: List of the trainable variables.

        Raises:
            TypeError: If it is no list of variables.
            ValueError: If a variable is complex, or there twice.
        """
        if self.built:
            return
        variables = check_trainable("variables", variables)
        super().build(variables)
        self._sort_out(variables)
        self._add_slots(variables)
        warn_of_idle_patterns([*self._exclusions(), by_names(self)])

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        """Excludes variables from both kinds of weight decay, not from adaptation.

        What the argument of the same name excludes stays excluded.

        Args:
            var_list: List of variables to exclude. Defaults to `None`.
            var_names: List of regular expressions; a variable is excluded if its
                name, which is the last part of its path, holds a match of one of
                them. Defaults to `None`.
        """
        super().exclude_from_weight_decay(*check_exclusions(var_list, var_names))
        if self.built:
            warn_of_idle_patterns([by_names(self)])

    def _exclusions(self):
        """Returns the `Exclusion`s by arguments of the constructor, a list."""
        raise NotImplementedError

    def _sort_out(self, variables):
        """Finds out how each variable is treated."""
        raise NotImplementedError

    def _add_slots(self, variables):
        raise NotImplementedError

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
        grads, variables = check_gradients(self, grads, trainable_variables)
        own_in_scope([*variables, *self.variables])
        super().apply(backend.steppable(grads), variables)

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        """Does what `apply` does, on values that come in and go out.

        The values that come in stay as they are.

        Args:
            optimizer_variables: List of tensors, the values of
                `optimizer.variables`.
            grads: List of gradients, one for each trainable variable.
            trainable_variables: List of tensors, the values of the variables that
                the optimizer was built for.

        Returns:
            A tuple of the new values of `trainable_variables` and of
            `optimizer_variables`.

        Raises:
            ValueError: On PyTorch, if autograd follows a gradient, since it cannot
                follow the step; on TensorFlow, as in Keras.
        """
        own = as_list("optimizer_variables", optimizer_variables, "tensors")
        trained = as_list("trainable_variables", trainable_variables, "tensors")
        grads = as_list("grads", grads, "gradients, one for each variable")
        backend.check_not_followed([*grads, *own])
        trained, own = super().stateless_apply(own, grads, trained)
        return trained, like(optimizer_variables, own)

    def finalize_variable_values(self, var_list):
        """Sets the final values of the variables, those of their averages if any.

        Args:
            var_list: List of the trainable variables.
        """
        super().finalize_variable_values(as_list("var_list", var_list, "variables"))
